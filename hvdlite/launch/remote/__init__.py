"""Ranks on other hosts: ssh, which starts an agent there, and the messages to and from agents."""
