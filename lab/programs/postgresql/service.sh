# The database of the jobs with PostgreSQL: one client at a time, on 127.0.0.1 and a socket.
shared_buffers=64MB
bin=$(echo /usr/lib/postgresql/*/bin)

# start_postgresql: starts the server of the database in /job/data.
start_postgresql() {
    install -d -o postgres -g postgres /run/postgresql || return
    as postgres "$bin/pg_ctl" -D /job/data -w -t 300 -l /job/data/log \
        -o "-c shared_buffers=$shared_buffers -c fsync=off -c listen_addresses=127.0.0.1 -c autovacuum=off -c jit=off" start
}

# make_postgresql: makes an empty database `bench` and starts its server.
make_postgresql() {
    install -d -o postgres -g postgres /job/data || return
    as postgres "$bin/initdb" -D /job/data --no-sync && start_postgresql && as postgres createdb bench
}

stop_postgresql() {
    as postgres "$bin/pg_ctl" -D /job/data -w -t 300 -m fast stop
}

# sql FILE...: runs statements; the first error ends it.
sql() {
    for file; do
        as postgres psql -X -q -A -t -v ON_ERROR_STOP=1 -f "$file" bench || return
    done
}

# load FOLDER OPTIONS: copies the file of each table, FOLDER/TABLE.csv.
load() {
    for file in "$1"/*.csv; do
        table=${file##*/}
        as postgres psql -X -q -v ON_ERROR_STOP=1 -c "COPY ${table%.csv} FROM STDIN ($2)" bench <"$file" || return
    done
}
