model {
  network =
    - conv2d
    - relu
}
