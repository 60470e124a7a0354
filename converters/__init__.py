"""Turns model files into what Rimuru reads fastest. Nothing in `rimuru` imports this but the command `convert`."""
