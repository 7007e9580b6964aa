"""The exception types and the four parts of every refusal."""

import pytest

from moedecode import InvalidInput, MissingExtra, MoEDecodeError, UnsupportedConfig
from moedecode.gates import invalid, require, unsupported
from moedecode.presets import UnknownPreset


@pytest.mark.parametrize(
    ("kind", "builtin"),
    [
        (InvalidInput, ValueError),
        (UnsupportedConfig, ValueError),
        (MissingExtra, ImportError),
        (UnknownPreset, KeyError),
    ],
)
def test_one_base_and_the_builtin_people_expect(kind, builtin):
    assert issubclass(kind, MoEDecodeError) and issubclass(kind, builtin)


def test_malformed_and_unsupported_are_told_apart():
    assert not issubclass(InvalidInput, UnsupportedConfig) and not issubclass(UnsupportedConfig, InvalidInput)
    assert issubclass(UnknownPreset, InvalidInput)


@pytest.mark.parametrize(("build", "kind"), [(invalid, InvalidInput), (unsupported, UnsupportedConfig)])
def test_a_refusal_names_argument_value_rule_and_way_out(build, kind):
    error = build("top_k", 9, "must lie in 1..8", "choose fewer experts")
    assert type(error) is kind
    assert str(error) == "top_k=9: must lie in 1..8; choose fewer experts"


def test_require_raises_only_when_the_condition_fails():
    require(True, "x", 1, "rule", "instead")
    with pytest.raises(InvalidInput, match=r"^x=1: rule; instead$"):
        require(False, "x", 1, "rule", "instead")
