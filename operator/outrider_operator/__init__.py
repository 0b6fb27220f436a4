"""The operating half of Outrider: reconciles SpeculativeModel resources into serving pods."""
