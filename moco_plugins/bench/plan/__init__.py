"""What a comparison is: its settings, data and runs, complete and checked before anything is trained."""
