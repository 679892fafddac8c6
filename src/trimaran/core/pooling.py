"""How one vector is made of a prompt's hidden rows, where no answer is wanted."""

POOLINGS = ("mean", "last")
"""The mean of all rows after the final norm, or the last one: names of llama.cpp and vLLM."""
