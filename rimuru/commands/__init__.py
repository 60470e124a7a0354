"""What each subcommand of `rimuru` does; cli.py reads the arguments and calls one of these."""
