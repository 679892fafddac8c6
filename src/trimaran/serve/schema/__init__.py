"""Bodies of requests, as pydantic models: an unknown field is refused by its name."""
