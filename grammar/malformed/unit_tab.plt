evaluate {
  every = 500	steps
}
