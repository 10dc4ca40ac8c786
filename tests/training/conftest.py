"""Fixtures of the tests that look at saved steps."""
from tests.training.steps import folder, two_steps

__all__ = ['folder', 'two_steps']
