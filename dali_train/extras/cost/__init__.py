"""What a run will take, before it starts: memory from shapes alone, and time by short measurements."""
