"""Speed and quality measurements."""
