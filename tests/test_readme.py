"""The README's example runs as it stands, and what the README links to exists."""

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
README = (ROOT / "README.md").read_text()
EXAMPLES = re.findall(r"^```python\n(.*?)^```", README, re.DOTALL | re.MULTILINE)


def test_the_example_runs_and_prints_a_plan(capsys):
    assert len(EXAMPLES) == 1
    names = {}
    exec(compile(EXAMPLES[0], "README.md", "exec"), names)
    assert names["out"].shape == (4, 256) and names["out"].dtype == "bfloat16"
    assert capsys.readouterr().out.startswith("cpu: 4 tokens, strategy ")


def test_the_example_stays_short():
    assert len([line for line in EXAMPLES[0].splitlines() if line and not line.startswith("import")]) <= 10


def test_links_lead_somewhere():
    targets = re.findall(r"\]\(([^)#]+)\)", README)
    assert targets
    for target in targets:
        assert (ROOT / target).exists(), target
