"""The model runner: arrays and compiled functions of one engine, steps, KV transfers between tiers, memory planning."""
