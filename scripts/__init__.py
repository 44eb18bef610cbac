"""What writes the pages that no person should write."""
