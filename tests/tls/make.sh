#!/bin/sh
# Makes the certificates of this folder anew. They are for tests: nothing trusts them but a test that says so.
set -eu
cd "$(dirname "$0")"
openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -keyout ca.key -out ca.pem -days 36500 \
    -subj "/CN=Millstream test authority" -addext "basicConstraints=critical,CA:TRUE"
openssl req -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -keyout server.key -out server.csr -subj "/CN=mail.test"
printf 'subjectAltName=DNS:mail.test,IP:127.0.0.1\nbasicConstraints=CA:FALSE\nextendedKeyUsage=serverAuth\n' >server.ext
openssl x509 -req -in server.csr -CA ca.pem -CAkey ca.key -CAcreateserial -days 36500 -extfile server.ext -out server.pem
rm -f ca.key ca.srl server.csr server.ext
