"""`python -m launch.cli` is `sparo`, for torchrun."""

from .main import main

main()
