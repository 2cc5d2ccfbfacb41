"""Ranks on other hosts: how their agents are started (ssh), and the messages to and from agents."""
