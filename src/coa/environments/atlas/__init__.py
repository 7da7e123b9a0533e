"""The Atlas: an encyclopedia of facts, its worlds, its questions, and a team that answers them."""
