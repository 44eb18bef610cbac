"""What plans foresee and choose, against every candidate run."""
