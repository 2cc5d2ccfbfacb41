"""How the ranks of a job find and trust each other, before the native core moves any byte."""
