"""SimpleLLM: an inference engine for gpt-oss that a course builds step by step."""

__version__ = "0.1.0"
