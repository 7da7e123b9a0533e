"""Attacks on the code sandbox: what is tried (one module per category) and how it is judged."""
