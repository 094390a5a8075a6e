data {
  batch: 64
  source = synthetic(size: 10)
}

param width: 3
