"""The questions that the demo model is taught: their wordings, their answers, and made-up tools for their prompts."""
