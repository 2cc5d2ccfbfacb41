"""Elastic training: workers die, come and go, and training goes on in the same processes."""
