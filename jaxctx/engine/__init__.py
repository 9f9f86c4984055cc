"""Engine: the loop that turns contexts with work into ragged steps."""
