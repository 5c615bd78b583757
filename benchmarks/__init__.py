"""Benchmarks of the platform, whose processes share the secret of one test installation."""

import os

from sluice import shared_secret

os.environ.setdefault("INSTALLATION__SECRET", "of-the-benchmarks-" + "0123456789abcdef" * 2)
shared_secret.use()
