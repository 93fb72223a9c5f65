"""python -m greedysnake."""

from greedysnake.cli import main

if __name__ == "__main__":
    main()
