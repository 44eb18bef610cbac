"""anybatch inside the trainers of other libraries; each needs its library, an optional extra.

Nothing else imports these libraries.

Read `install`, then `transformers`, `lightning` or `nnunet`.
"""
