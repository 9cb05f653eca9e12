"""What a comparison does: one run after the other, watched and evaluated."""
