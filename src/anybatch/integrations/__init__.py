"""anybatch inside the trainers of other libraries; each needs its library, an optional extra.

Nothing else imports these libraries.

Read `install` (the extra that is missing) and `handed` (a loss whose gradients are there before its
backward), then one of `transformers` (with `transformers_losses`, `transformers_padding` and
`transformers_refused`), `lightning` (with `lightning_step`), `trl` (with `trl_rows` and
`trl_documents`), `nnunet` and `ultralytics`. Accelerate needs no file: its loop calls
``engine.backward`` instead of ``accelerator.backward``.
"""
