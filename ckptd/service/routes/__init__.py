"""The routes, by subject. Each is a few lines over the ledger; the rules are not here."""
