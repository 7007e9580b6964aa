"""``python -m moedecode``: the commands, without the script on the PATH."""

from .cli import main

if __name__ == "__main__":
    main()
