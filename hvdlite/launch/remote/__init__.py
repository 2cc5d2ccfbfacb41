"""Ranks on other hosts: ssh, the agent that it starts there, and their messages."""
