"""Ranks on other hosts: the ways to their agents (ssh), and the messages to and from agents."""
