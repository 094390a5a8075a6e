param width == 256

train {
  optimizer = adamw(lr == 3e-4)
}

parallelism == auto
