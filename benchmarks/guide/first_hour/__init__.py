"""A new user's first hour: loops written from habit, and the lines that change."""
