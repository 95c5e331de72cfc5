"""bstar: the capacity planner for LLM serving."""
