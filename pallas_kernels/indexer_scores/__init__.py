"""Scores of all index keys of a sequence against tiles of query rows, with the maxima over candidate blocks."""
