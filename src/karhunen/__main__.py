"""`python -m karhunen` is `karhunen`."""

from karhunen.cli import main

if __name__ == "__main__":
    main()
