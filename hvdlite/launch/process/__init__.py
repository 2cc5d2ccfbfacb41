"""Processes of this host: starting ranks, sharing cores among them, and ending them all."""
