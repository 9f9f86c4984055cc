"""The engine core: requests on their way through the engine, the step loop that drives them, and their output."""
