"""Models larger than one PC: a pipeline cuts a model into stages, and each PC of the pipeline holds one stage."""
