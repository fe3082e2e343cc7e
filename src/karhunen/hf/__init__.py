"""The part that knows transformers. Importing it makes `attn_implementation="karhunen"` known there."""

from karhunen.hf.attention import register

register()
