"""Layer maths by calling a backend's verbs. Nothing here knows which backend runs."""
