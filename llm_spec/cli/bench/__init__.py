"""`llm-spec bench`: contenders, measurement, figures and reports."""
