launch {
  timeout = 5µs
}
