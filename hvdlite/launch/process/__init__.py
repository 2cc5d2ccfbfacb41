"""Ranks as processes of this host: how they start, what they may use, and how they end."""
