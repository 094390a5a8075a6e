data {
  batch = 64;
  workers = 2;
}
