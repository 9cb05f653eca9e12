"""What a comparison found: tables, statistics, figures and the page."""
