"""The `sluice` command."""

from cli.app import app


def main() -> None:
    """Run the command line."""
    app()


if __name__ == "__main__":
    main()
