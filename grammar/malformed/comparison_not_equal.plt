expect {
  devices != 16
}
