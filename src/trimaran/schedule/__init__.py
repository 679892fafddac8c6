"""Who computes how many tokens in the next step; policies that decide it; no time of its own."""
