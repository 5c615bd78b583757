"""Benchmarks; their processes are of one installation of their own."""

import os

from sluice import shared_secret

os.environ.setdefault("INSTALLATION__SECRET", "of-the-benchmarks-" + "0123456789abcdef" * 2)
shared_secret.use()
